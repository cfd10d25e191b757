"""The paper's tables of trained networks: ``gnomon reproduce cifar100 | tiny-imagenet | imagenet-100 | gpt``."""
