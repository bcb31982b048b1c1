"""Authentication and limits: API keys, tenants, permissions and quotas."""
