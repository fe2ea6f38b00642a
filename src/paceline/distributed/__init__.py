"""How the nodes and ranks of a job find each other and agree."""
