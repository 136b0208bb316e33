"""The hostfile of launch/multi_node.sh, and the options that go with it."""

from __future__ import annotations

from bad_inputs.case import Case, Content

ARGUMENTS = ["{here}/hostfile", "--no-doctor", "--deepspeed", "x.json"]


def hostfile(wrong: str, content: Content, *says: str) -> Case:
    return Case(wrong, ["hostfile", *says], entry="multi_node", argv=ARGUMENTS, files={"hostfile": content})


def option(wrong: str, argument: str, *says: str) -> Case:
    argv = ["{here}/hostfile", *argument.split("|"), "--deepspeed", "x.json"]
    return Case(wrong, says, entry="multi_node", argv=argv, files={"hostfile": "a slots=1\nb slots=1\n"})


CASES = [
    Case(
        "a hostfile that is not there",
        ["hosts", "No such file", "worker-1 slots=8"],
        entry="multi_node",
        argv=["{here}/hosts", "--deepspeed", "x.json"],
    ),
    Case(
        "a hostfile that is a folder",
        ["{here}", "Is a directory", "worker-1 slots=8"],
        entry="multi_node",
        argv=["{here}", "--deepspeed", "x.json"],
    ),
    hostfile("an empty hostfile", "", "lists no machine", "worker-1 slots=8"),
    hostfile("a hostfile of comments", "# a slots=1\n\n", "lists no machine"),
    hostfile("a hostfile in UTF-16", "a slots=1\n".encode("utf-16"), "not UTF-8"),
    hostfile(
        "a machine without slots", "a slots=1\nb\n", ":2:", "got 'b', expected a name", "worker-1 slots=8"
    ),
    hostfile("a machine of no slots", "a slots=0\n", ":1:", "expected a name and a number of ranks"),
    hostfile("slots in words", "a slots=two\n", ":1:", "expected a name and a number of ranks"),
    hostfile("slots below zero", "a slots=-1\n", ":1:", "expected a name and a number of ranks"),
    hostfile("slots with a space", "a slots = 2\n", ":1:", "expected a name and a number of ranks"),
    hostfile(
        "mpirun's own hostfile", "a:8\n", ":1:", "expected a name and a number of ranks", "worker-1 slots=8"
    ),
    hostfile("a machine with a user", "me@a slots=1\n", ":1:", "~/.ssh/config"),
    hostfile(
        "a machine that is an option",
        "-oProxyCommand=x slots=1\n",
        ":1:",
        "expected a name and a number of ranks",
    ),
    hostfile("a machine with a command", "a;reboot slots=1\n", ":1:", "got the name 'a;reboot'"),
    hostfile("a machine of escapes", "a\x1b[2J slots=1\n", ":1:", "\\x1b"),
    hostfile("a machine twice", "a slots=1\nb slots=1\na slots=2\n", ":3:", "a is already on line 1"),
    hostfile(
        "a machine of a megabyte", "a" * 1_000_000 + "\n", ":1:", "expected a name and a number of ranks"
    ),
    option("a machine that is not in the hostfile", "--include|c", "c", "hostfile"),
    option("a device that the machine has not", "--include|a:5", "a", "5"),
    option("every machine left out", "--exclude|a@b", "a@b"),
    option("an include in words of its own", "--include|a:x", "a:x"),
    option("include and exclude", "--include|a|--exclude|b", "--include", "--exclude"),
    option("a launcher that is not there", "--launcher|rsh", "--launcher", "'rsh'", "pdsh"),
    option("a number of machines in words", "--num_nodes|two", "--num_nodes", "'two'"),
    option("a port in words", "--master_port|abc", "--master_port", "'abc'"),
    option("a variable that is not set", "--export|NOWHERE_SET", "--export NOWHERE_SET", "not set"),
    option("an option of multi_node.sh misspelt", "--no-docter", "--no-docter", "--help"),
]
