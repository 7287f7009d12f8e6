"""What the doctor examines, and how it reports."""
