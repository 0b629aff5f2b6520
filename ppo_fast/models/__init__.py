"""The four roles (policy, reference, critic, reward) and how they share weights."""
