"""Jobs on machines behind ssh, and on "nodes" of this one, which is the same plan."""

from paceline.launch.control import fetch, plan, status, stop, submit, tidy
from paceline.launch.following import follow

resume = submit  # a run of that name that is not finished goes on

__all__ = ["fetch", "follow", "plan", "resume", "status", "stop", "submit", "tidy"]
