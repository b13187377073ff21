"""What a script's use of autograd costs: unused gradients, repeated forward passes."""
