"""Hot operations: a plain reference beside the fast path of each. Imports only torch and triton."""
