"""How the nodes of a job find each other, agree to be one job, and learn who of them failed."""
