"""What several tests and the scripts that measure share."""
