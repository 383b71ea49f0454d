"""The results of a run for a person: page, summary, terminal and JUnit file."""
