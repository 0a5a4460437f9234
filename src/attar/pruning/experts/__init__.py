"""Experts of a mixture removed or merged, and fewer of them active."""
