"""Rendezvous: the nodes of a job find each other, agree to be one job, and learn which of them failed."""
