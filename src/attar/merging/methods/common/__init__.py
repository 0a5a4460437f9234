"""What several merge methods share."""
