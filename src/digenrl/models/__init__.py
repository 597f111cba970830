"""Model families behind one `Policy` protocol: adapters, tiny builds, export."""
