"""Rendezvous, process groups and gradient synchronization between the nodes and ranks of a job."""
