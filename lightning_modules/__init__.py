"""LightningModules, networks and the ways to run local training."""
