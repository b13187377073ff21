"""Predictions of hotloop advise against measured training times of others."""
