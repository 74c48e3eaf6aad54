"""Rendezvous of the nodes of a job, and their messages to each other during its life."""
