"""Tables and summaries of runs: reads run directories, and imports neither actors nor strategies."""
