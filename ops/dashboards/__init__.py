"""A Grafana dashboard, its provisioning and alert rules, made from the table of metrics."""
