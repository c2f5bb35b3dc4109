"""A model that nobody prepared, as a graph: what its operators read and give, and where it can be left or cut."""
