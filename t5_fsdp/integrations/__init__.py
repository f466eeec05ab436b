"""What connects this program with others: trainers and trackers."""
