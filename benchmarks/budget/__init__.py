"""Time of a step on a device, part by part: what it needs at least, and what a profile shows."""
