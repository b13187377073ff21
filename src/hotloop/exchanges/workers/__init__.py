"""The exchange of slow data sets: processes that fetch the script's own batches ahead, proven and raced."""
