"""The Ray Serve application around aphoton: deployments and HTTP endpoints, imported as ``aphoton_serve``."""
