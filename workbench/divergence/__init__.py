"""One step performed in other and other ways, and where two of them part."""
