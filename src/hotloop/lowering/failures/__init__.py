"""What went wrong while training, in one line that names the place and what to do."""
