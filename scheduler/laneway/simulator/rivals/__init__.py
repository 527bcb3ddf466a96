"""The baselines that Laneway is compared with, each as good as its idea allows."""
