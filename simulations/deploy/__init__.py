"""A real federation, and the trusted third parties of a simulated one."""
