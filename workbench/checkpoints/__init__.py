"""A checkpoint as its folder holds it: the commit record, and the files that it vouches for, read and written."""
