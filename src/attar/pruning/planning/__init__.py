"""Plans of structured pruning: what cuts cost (a scan), which plans a budget allows, and which is best."""
