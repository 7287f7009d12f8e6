"""What an autopsy looks at, one suspicion a module."""
