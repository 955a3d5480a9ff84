"""The descriptor pool of the generated messages, apart from the default one."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
