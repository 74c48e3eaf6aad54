"""A small kubelet and Job controller for tests: runs an Indexed Job and its Service, as rendered,
on hosts made of namespaces.

It honours commands, environment, volumes, users, exit codes, failure policy, retries, replacement,
grace and deadline. `image` is ignored: this machine's programs are there, and this project is the
working folder. Scheduling, resources (but for the size of /dev/shm), labels and seccomp profiles
are read and do nothing. What it does not know is an error, so that nothing of a manifest is left
out in silence.
"""
