"""A region under saved-tensor hooks: autograd saves slots in place of tensors, and a recompute fills them."""
