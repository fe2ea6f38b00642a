"""The backend for ssh hosts, and for local nodes, which follow the same plan."""

from paceline.launch.control import clean_up, fetch, plan, status, stop, submit
from paceline.launch.supervisor import follow

resume = submit  # an unfinished run of that name continues

__all__ = ["clean_up", "fetch", "follow", "plan", "resume", "status", "stop", "submit"]
