"""AWS errors as errors that a user can fix."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import UserError
from paceline.system.files import printable

_QUOTA = ("ec2-quota-exceeded", "Your quota of such instances is used up. Request an increase under Service Quotas.")
_CREDENTIALS = ("aws-credentials-invalid", "Run `aws configure`, or check the AWS_* variables.")
# error codes of AWS, our code, and the fix
_AWS_ERRORS = {
    "InsufficientInstanceCapacity": (
        "ec2-no-capacity",
        "There is no capacity. Try another --zone or --instance-type, or omit --spot.",
    ),
    "SpotMaxPriceTooLow": ("ec2-price-above-limit", "The price is above --max-price. Raise it, or wait."),
    "MaxSpotInstanceCountExceeded": _QUOTA,
    "VcpuLimitExceeded": _QUOTA,
    "InstanceLimitExceeded": _QUOTA,
    "InvalidInstanceType": (
        "ec2-unknown-instance-type",
        "The type does not exist in this region. Check --instance-type and --region.",
    ),
    "InvalidAMIID.NotFound": (
        "ec2-unknown-image",
        "The image does not exist in this region. Check --image-id and --region.",
    ),
    "InvalidVolume.ZoneMismatch": (
        "ec2-volume-in-other-zone",
        "The volume is in another zone. Set --zone, or replicate the volume from a snapshot.",
    ),
    "VolumeInUse": (
        "ec2-volume-in-use",
        "The volume is attached to another instance. Detach it, or replicate it from a snapshot.",
    ),
    "UnauthorizedOperation": (
        "aws-not-authorized",
        "Your AWS user lacks permissions on EC2; docs/guides/launch/ec2.md lists the required ones.",
    ),
    "AuthFailure": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "InvalidParameterValue": (
        "aws-value-rejected",
        "AWS rejects a value. Check --instance-type, --zone, --instance-profile and the options of the volume.",
    ),
}


@contextmanager
def translate_aws_errors(action: str) -> Iterator[None]:
    """Raise errors of AWS as UserError, with the failed action and a fix."""
    import botocore.exceptions as aws
    from botocore.parsers import ResponseParserError

    try:
        yield
    except aws.NoCredentialsError:
        fix = "Run `aws configure`, or set the AWS_* variables."
        raise UserError("aws-credentials-missing", f"{action} failed: there are no AWS credentials. {fix}") from None
    except aws.NoRegionError:
        message = f"{action} failed: the region is unknown. Pass --region, or set AWS_REGION."
        raise UserError("aws-region-missing", message) from None
    except aws.ClientError as error:
        details = error.response["Error"]
        code, fix = _AWS_ERRORS.get(details["Code"], ("aws-error", "See the message of AWS."))
        message = printable(f"{action} failed: {details['Message']} ({details['Code']}). {fix}")
        raise UserError(code, message, aws_code=details["Code"]) from None
    except aws.ParamValidationError as error:
        raise UserError("aws-value-rejected", f"{action} failed: {' '.join(str(error).split())}") from None
    except (aws.BotoCoreError, ResponseParserError) as error:
        message = f"{action} failed: {error}. Check the network and the AWS_* variables."
        raise UserError("aws-unreachable", message) from None
