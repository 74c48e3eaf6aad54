"""Machines for tests, on this one: each is a network, PID, mount and UTS namespace of its own,
joined by a switch.

    with Network(tmp_path) as network:
        first, second = network.host("node-0"), network.host("node-1")
        done = second.run(["python", "-c", "import socket; print(socket.gethostbyname('node-0'))"])
        network.cut(second)
        first.kill()                      # the whole machine at once

Nothing of it has a name outside of the namespaces: the kernel removes it with the last process, and
the processes end with the one that made them, however it ends. It needs root; elsewhere `why_not()`
returns the reason.
"""
