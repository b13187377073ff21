"""Records -> tables, pictures and pages. Reads records alone: needs no torch and no GPU."""
