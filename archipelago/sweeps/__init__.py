"""Many experiments at once on Ray Tune: trials, samplers, schedulers, dry runs."""
