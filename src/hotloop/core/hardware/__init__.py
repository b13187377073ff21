"""This machine: its devices, their memory and their measured speed."""
