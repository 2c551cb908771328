"""Loss per domain over mixture weights: the law, the best mixture, the mixtures to train next."""
