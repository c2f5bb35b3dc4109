"""How: the Ray Serve graph - ingress, stages, what passes between them. The only folder of the product with ray."""
