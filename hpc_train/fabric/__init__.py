"""What connects the GPUs of a cluster: found without privileges, matched, and the few variables that follow from it."""
