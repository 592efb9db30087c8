//! Graph, types, operators and the reference interpreter.
