"""What a run tells the person who started it."""
