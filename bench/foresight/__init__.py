"""Predictions of `hotloop advise` against measurements that played no part in them."""
