from tests.coordinator.conftest import postgres, postgres_url, s3  # noqa: F401
from tests.end_to_end.conftest import kit, text  # noqa: F401
