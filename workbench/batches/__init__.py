"""Which data was in a step."""
