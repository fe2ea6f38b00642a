"""ssh errors as errors that a user can fix."""

import re

from paceline.launch.host_output import shown

# what ssh prints, the code, and the fix
_SSH_PROBLEMS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "host-key-changed",
        "the host key has changed; another machine may be answering. If the host was reinstalled, remove the old key "
        "with `ssh-keygen -R {host}`.",
    ),
    "Host key verification failed|No .* host key is known": (
        "host-key-unknown",
        "the host key is unknown. Run `ssh {host}` once, and verify the fingerprint that it shows.",
    ),
    "Permission denied": (
        "ssh-permission-denied",
        "the host rejects your key. Check `ssh {host}`, the keys in ssh-agent, and authorized_keys on the host.",
    ),
    "Could not resolve hostname": (
        "host-not-found",
        "the host name does not resolve. Check the spelling and ~/.ssh/config.",
    ),
    "Connection refused": (
        "ssh-connection-refused",
        "nothing is listening on the ssh port. Check that sshd runs and that the port in ~/.ssh/config is right.",
    ),
    "timed out|No route to host|Network is unreachable": (
        "host-unreachable",
        "the host is unreachable. Check that it is running and that no firewall blocks ssh.",
    ),
}


def ssh_problem(host: str, errors: str) -> tuple[str, str]:
    """Return the code and the message for what ssh printed."""
    for pattern, (code, message) in _SSH_PROBLEMS.items():
        if re.search(pattern, errors):
            return code, message.format(host=host)
    lines = errors.strip().splitlines()
    return "ssh-failed", f"ssh failed: {shown(lines[-1]) if lines else 'it printed no error message'}"
