//! The `astrai` library: what the commands call.
