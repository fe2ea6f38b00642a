"""Jobs on machines behind ssh, and on "nodes" of this one, which is the same plan."""

from paceline.launch.control import fetch, plan, status, stop, submit, tidy
from paceline.launch.following import follow

__all__ = ["fetch", "follow", "plan", "status", "stop", "submit", "tidy"]
