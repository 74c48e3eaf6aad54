"""Programs for people who work on the framework; none of them is installed with it."""
