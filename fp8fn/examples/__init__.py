"""Programs for `torchrun`, each as short as a user's own."""
