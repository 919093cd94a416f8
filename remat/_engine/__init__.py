"""Regions under autograd's saved-tensor hooks: slots in place of tensors, and the recompute that fills them."""
